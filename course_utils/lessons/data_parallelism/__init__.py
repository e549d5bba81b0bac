"""Lesson 10: its model code, figures, widget, checks and quiz."""
