# One line a target. `make help` lists them; everything else is the `flywheel` command and nox.
PYTHON ?= python3
IN = @$(PYTHON) infra/bootstrap.py

.PHONY: help flywheel report test lint run
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

flywheel: ## record, train, convert, serve, evaluate, report; goes on where it stopped (ARGS="--fresh")
	$(IN) flywheel run --profile laptop $(ARGS)

report: ## write runs/laptop/report.html again (ROOT=another folder)
	$(IN) flywheel report --root $(or $(ROOT),runs/laptop)

test: ## every check: lint, types, unit, distributed, simulator, end to end
	$(IN) --test python tests/run_all.py $(ARGS)

lint: ## style, formatting and types only
	$(IN) --test nox -s lint types

run: ## a stage's own command: make run STAGE=libero-eval ARGS="record --help"
	$(IN) --stage $(or $(STAGE),$(error name a stage: make run STAGE=libero-eval)) $(STAGE) $(ARGS)
