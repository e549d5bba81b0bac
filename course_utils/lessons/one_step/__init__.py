"""Lesson 01: its checks and quiz."""
