"""Lesson 13: its model code, figures, widget, checks and quiz."""
