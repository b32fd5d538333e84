"""The old name of `python -m benchmarks`, for one release."""

raise SystemExit("The suites are `python -m benchmarks SUITE` in a checkout of hf_vq.")
