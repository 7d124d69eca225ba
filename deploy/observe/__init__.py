"""What can be watched: the metric catalogue, dashboards and rules made from it, scrape targets of a fleet."""
