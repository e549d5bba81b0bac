"""Lesson 07: its checks and quiz."""
