"""The parts of a notebook that a learner answers: guesses, ledgers, widgets, quizzes, checks, progress."""
