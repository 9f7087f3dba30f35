"""`python -m fp8lab`: the command line."""

from fp8lab.cli import main

raise SystemExit(main())
