"""Putting an engine together: `plan.resolve` decides, without side effects; `build.build` makes the parts.

All engines are made here: for the Python API, for transformers' `generate`, and for the planner, whose models take
virtual time. A test allows no other module to make one.
"""
