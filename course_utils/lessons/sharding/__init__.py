"""Lesson 11: its model code, figures, widget, checks and quiz."""
