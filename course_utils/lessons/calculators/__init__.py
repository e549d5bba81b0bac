"""Lesson 18: its model code, figures, widget, checks and quiz."""
