"""What the history answers: each job takes the lake's events as a DataFrame and returns a DataFrame.

Nothing but column expressions, so that executors need no Python of ours. The jobs that also run incrementally are in
two steps: `partial` sums up a batch of events by window, and `result` merges the sums of any number of batches. Every
sum merges exactly, so that it does not matter in how many batches the events came.
"""
