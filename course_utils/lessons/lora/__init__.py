"""Lesson 16: its figure, text, checks and quiz."""
