"""Run the command line: `python -m amp_track` is the same as `amp-track`."""

if __name__ == "__main__":
    from amp_track.cli import main

    main()
