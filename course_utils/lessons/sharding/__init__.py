"""Lesson 09: its model code, figures, widget, checks and quiz."""
