"""Rollouts on servers: a pool of engines, adapters that follow the trainer, rollouts ahead by a bound."""
