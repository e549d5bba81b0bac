"""Lesson 15: its plans for a cluster, checks and quiz."""
