"""Lesson 19: its model code, figures, widget, checks and quiz."""
