"""The tasks that come with can-train, each found as a task of any other package is: by its entry point."""
