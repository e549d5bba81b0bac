"""Lesson 13: its checks and quiz."""
