"""Lesson 16: its model code, figures, widget, checks and quiz."""
