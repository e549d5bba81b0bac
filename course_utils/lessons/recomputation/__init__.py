"""Lesson 06: its model code, figures, widget, checks and quiz."""
