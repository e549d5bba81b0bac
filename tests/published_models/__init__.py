"""The published steps, each written anew in plain torch:
`course_utils.recording.published_steps` has the figures.
"""
