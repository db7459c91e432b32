"""Make models smaller: calibration, Q/DQ, accuracy checks (workstation half)."""
