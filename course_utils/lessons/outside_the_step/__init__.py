"""Lesson 13: its checks and quiz, and what a GPU counted outside of the step."""
