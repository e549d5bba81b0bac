"""Lesson 12: its model code, figures, widget, checks and quiz."""
