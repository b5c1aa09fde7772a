"""Putting an engine together: `plan.resolve` decides, without side effects; `build.build` obeys.

Everybody who needs an engine comes here: the Python API, transformers' `generate`, the planner with models that take
virtual time. A test allows nobody else to make one.
"""
