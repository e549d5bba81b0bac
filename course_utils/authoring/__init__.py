"""From one text source a lesson: executed notebooks, exercises with gaps, solutions. For authors alone."""
