"""Lesson 04: its model code, figures, widget, checks and quiz."""
