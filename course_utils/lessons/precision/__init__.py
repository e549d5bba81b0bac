"""Lesson 03: its model code, figures, widget, checks and quiz."""
