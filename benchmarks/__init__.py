"""Measurements of the zoo: programs that append rows to results/*.jsonl, and the tables made of those rows."""
