"""Lesson 08: its model code, figures, widget, checks and quiz."""
