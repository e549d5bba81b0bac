"""Lesson 17: its figures, widget, checks and quiz."""
