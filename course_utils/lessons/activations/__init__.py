"""Lesson 05: its model code, figures, widget, checks and quiz."""
