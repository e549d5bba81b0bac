"""The published steps, each written anew in plain torch:
`course_utils.recording.published` has the figures.
"""
