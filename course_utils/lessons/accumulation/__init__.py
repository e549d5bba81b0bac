"""Lesson 07: its model code, figures, widget, checks and quiz."""
