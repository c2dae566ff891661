"""A suite that any policy-gradient loss can be held against: closed forms, derivatives, expectations."""
