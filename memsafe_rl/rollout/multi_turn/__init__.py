"""Episodes of several turns: agents, tools, environments and simulated users."""
