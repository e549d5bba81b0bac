"""The parts of a notebook that a learner answers: guesses, widgets, quizzes, checks, progress."""
