"""Ways to run an op, by device. `dispatch/table.py` names them, and imports what is asked for."""
