"""Lesson 01: its model code, figures, widget, checks and quiz."""
