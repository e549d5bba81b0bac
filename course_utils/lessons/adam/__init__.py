"""Lesson 02: its model code, figures, widget, checks and quiz."""
