// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// The colours of the screen, as ANSI codes.
const (
	bold    = "1"
	dim     = "2"
	red     = "31"
	green   = "32"
	yellow  = "33"
	magenta = "35"
	cyan    = "36"
)

// A screen is where everything is told, a line at a time, each with the seconds
// since the demo began. Only line and raw are safe for concurrent use.
type screen struct {
	began time.Time
	color bool
	flush func() // shows what belongs before the next line that tells something
	lost  func() // called when nobody reads any more

	mu sync.Mutex // guards w
	w  io.Writer
}

// newScreen uses colours on a terminal, unless NO_COLOR is set.
func newScreen(out *os.File) *screen {
	s := &screen{began: time.Now(), w: out, flush: func() {}, lost: func() {}}
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	s.color = terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return s
}

func (s *screen) paint(code, text string) string {
	if !s.color || code == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// line writes text, whose first line gets the time, the others an indent.
func (s *screen) line(text string) {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	stamp := s.paint(dim, fmt.Sprintf("%6.1f", time.Since(s.began).Seconds()))
	s.raw(stamp + "  " + strings.Join(lines, "\n        ") + "\n")
}

func (s *screen) raw(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := io.WriteString(s.w, text); err != nil {
		s.lost()
	}
}

// act begins a part of the demo.
func (s *screen) act(number int, title string) {
	s.flush()
	head := fmt.Sprintf("━━ %d ━━ %s ", number, title)
	s.raw("\n" + s.paint(bold, head+strings.Repeat("━", max(0, 100-utf8.RuneCountInString(head)))) + "\n")
}

// say tells what happens.
func (s *screen) say(format string, args ...any) {
	s.flush()
	s.line(s.paint(bold, fmt.Sprintf(format, args...)))
}

// tickPeriod is how often a long step says that it still runs.
const tickPeriod = 5 * time.Second

// during runs step, and tells every five seconds what is being waited for and,
// if status is not nil, how far it is.
func (s *screen) during(what string, status func() string, step func() error) error {
	begun := time.Now()
	ended := make(chan error, 1)
	go func() { ended <- step() }()
	tick := time.NewTicker(tickPeriod)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			return err
		case <-tick.C:
			text := fmt.Sprintf("… %.0f s: %s", time.Since(begun).Seconds(), what)
			if status != nil {
				if now := status(); now != "" {
					text += ": " + now
				}
			}
			s.line(s.paint(dim, text))
		}
	}
}

// pollPeriod is how often until looks.
const pollPeriod = 50 * time.Millisecond

// until waits, at most so long, for condition to return nil, and returns how long
// that took. what completes "waiting until". begun is what it counts from.
func (s *screen) until(ctx context.Context, begun time.Time, limit time.Duration, what string, condition func(context.Context) error) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var mu sync.Mutex
	var last error
	status := func() string {
		mu.Lock()
		defer mu.Unlock()
		if last == nil {
			return ""
		}
		return firstLine(last.Error())
	}
	err := s.during("waiting until "+what, status, func() error {
		tick := time.NewTicker(pollPeriod)
		defer tick.Stop()
		for {
			err := condition(ctx)
			if err == nil {
				return nil
			}
			if ctx.Err() == nil { // else it was cut off and says less than the one before
				mu.Lock()
				last = err
				mu.Unlock()
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("waited %v until %s: %s", limit, what, status())
			case <-tick.C:
			}
		}
	})
	return time.Since(begun), err
}

func firstLine(text string) string {
	const longest = 160
	text, _, _ = strings.Cut(text, "\n")
	if runes := []rune(text); len(runes) > longest {
		return string(runes[:longest]) + "…"
	}
	return text
}
