.PHONY: check format test test-fast bench

check:
	ruff check .
	ruff format --check .
	mypy
	codespell sf_torchrl tests examples benchmarks docs configs README.md CHANGELOG.md

format:
	ruff check --fix .
	ruff format .

test:
	pytest

test-fast:
	pytest -m "not slow and not multiprocess"

bench:
	python -m benchmarks.throughput --workload cartpole --mode train --seconds 10 --repeat 3
