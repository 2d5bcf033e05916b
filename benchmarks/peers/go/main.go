// A Go net/http server that does a queue's JSON work and nothing else: encoding/json, a mutex, a slice and a map.
// Run by benchmarks/server.py: it says its port on a line of standard output, and ends with standard input.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"
)

type item struct {
	Text string `json:"text"`
}

type produceRequest struct {
	Queue     string `json:"queue"`
	Items     []item `json:"items"`
	RequestID string `json:"request_id"`
}

type produced struct {
	ID            string `json:"id"`
	CorrelationID string `json:"correlation_id"`
}

type produceReply struct {
	Items []produced `json:"items"`
}

type leaseRequest struct {
	Queue string  `json:"queue"`
	Batch int     `json:"batch"`
	Wait  float64 `json:"wait"`
}

type leasedItem struct {
	ID            string    `json:"id"`
	Lease         string    `json:"lease"`
	CorrelationID string    `json:"correlation_id"`
	Attempts      int       `json:"attempts"`
	Deliveries    int       `json:"deliveries"`
	FencingToken  int       `json:"fencing_token"`
	LeaseDeadline time.Time `json:"lease_deadline"`
	CreatedAt     time.Time `json:"created_at"`
	Text          string    `json:"text"`
}

type leaseReply struct {
	Items []leasedItem `json:"items"`
}

type completeRequest struct {
	Queue  string   `json:"queue"`
	Leases []string `json:"leases"`
}

type result struct {
	OK            bool   `json:"ok"`
	CorrelationID string `json:"correlation_id"`
}

type completeReply struct {
	Results []result `json:"results"`
}

type entry struct {
	id            string
	correlationID string
	text          string
	createdAt     time.Time
}

type queue struct {
	lock   sync.Mutex
	number int
	ready  []entry
	leased map[string]entry
}

func (q *queue) produce(request *produceRequest) any {
	now := time.Now().UTC()
	reply := produceReply{make([]produced, 0, len(request.Items))}
	q.lock.Lock()
	defer q.lock.Unlock()
	for _, one := range request.Items {
		q.number++
		made := entry{
			"gogogogo-0-" + strconv.Itoa(q.number),
			fmt.Sprintf("01a1e21c-291c-7735-8b52-%012x", q.number),
			one.Text,
			now,
		}
		q.ready = append(q.ready, made)
		reply.Items = append(reply.Items, produced{made.id, made.correlationID})
	}
	return reply
}

func (q *queue) lease(request *leaseRequest) any {
	now := time.Now().UTC()
	q.lock.Lock()
	defer q.lock.Unlock()
	count := min(request.Batch, len(q.ready))
	reply := leaseReply{make([]leasedItem, 0, count)}
	for _, one := range q.ready[:count] {
		q.number++
		token := fmt.Sprintf("gogogogo.%056x", q.number)
		q.leased[token] = one
		reply.Items = append(
			reply.Items,
			leasedItem{one.id, token, one.correlationID, 1, 1, q.number, now, one.createdAt, one.text},
		)
	}
	q.ready = q.ready[count:]
	return reply
}

func (q *queue) complete(request *completeRequest) any {
	reply := completeReply{make([]result, 0, len(request.Leases))}
	q.lock.Lock()
	defer q.lock.Unlock()
	for _, token := range request.Leases {
		reply.Results = append(reply.Results, result{true, q.leased[token].correlationID})
		delete(q.leased, token)
	}
	return reply
}

func answer[Request any](work func(*Request) any) http.HandlerFunc {
	return func(writer http.ResponseWriter, request *http.Request) {
		var asked Request
		if err := json.NewDecoder(request.Body).Decode(&asked); err != nil {
			http.Error(writer, err.Error(), http.StatusBadRequest)
			return
		}
		body, err := json.Marshal(work(&asked))
		if err != nil {
			http.Error(writer, err.Error(), http.StatusInternalServerError)
			return
		}
		writer.Header().Set("Content-Type", "application/json")
		writer.Header().Set("Content-Length", strconv.Itoa(len(body)))
		writer.Write(body)
	}
}

func main() {
	bench := &queue{leased: map[string]entry{}}
	calls := http.NewServeMux()
	calls.HandleFunc("/v1/queue.produce", answer(bench.produce))
	calls.HandleFunc("/v1/queue.lease", answer(bench.lease))
	calls.HandleFunc("/v1/queue.complete", answer(bench.complete))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go http.Serve(listener, calls)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	io.Copy(io.Discard, os.Stdin)
}
