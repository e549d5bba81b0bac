"""Lesson 14: its model code, figures, widget, checks and quiz."""
