"""Dead items looked at and brought back in numbers, with a record of it that can undo it.

What is dead in a queue is in `dead.py`, the record in `record.py`; `redriving.py` and `undoing.py` do the work, on a
pond or a client. Which items are chosen by SQL is for `millpond.spark.triage` to say.
"""
