"""Scoring of finished episodes."""
