"""Memory, and who holds it: state spec, sizing, pools, leases, layouts. No process, socket, clock or model."""
