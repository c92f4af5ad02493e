"""The way of a weight from the trainer to the engines: names, plan, digest, export, transport, verify."""
