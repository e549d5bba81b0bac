"""From one text source a lesson: executed notebooks, exercises with gaps, solutions.
Only authors need this.
"""
