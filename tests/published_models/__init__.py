"""The published steps, each written anew in plain torch:
`course_utils.evidence.published` has the figures.
"""
