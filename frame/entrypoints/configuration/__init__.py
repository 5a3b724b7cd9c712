"""Where a configuration comes from: files, environment, flags, the machine; and how it is shown."""
