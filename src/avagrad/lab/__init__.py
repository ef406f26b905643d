"""The paper's experiments: tasks, models, methods, and reproducible training runs.

The trainer and the tasks need only torch and numpy (the digits also scikit-learn), so they run where nothing else is
installed: ``python -m avagrad.lab.train digits --optimizer avagrad``.
"""
