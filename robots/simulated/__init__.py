"""A simulated cell: franky-sim answers the real franky and libfranka on loopback, MuJoCo moves an FR3 at a table, cameras look on."""
