// Generated stubs on all services with toys at SPECREJ_ADDRESS; tests/clients starts both.
package client

import (
	"context"
	"io"
	"os"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	specrej "specrej.io/go/specrej/v1"
)

// connect returns a client, and a context that ends with the test.
func connect(t *testing.T) (specrej.OrchestratorServiceClient, context.Context) {
	connection, err := grpc.Dial(os.Getenv("SPECREJ_ADDRESS"), grpc.WithInsecure())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return specrej.NewOrchestratorServiceClient(connection), ctx
}

func request(maxTokens int32) *specrej.GenerateRequest {
	turn, n := &specrej.Message{Role: "user", Content: "Name three uses of a brick."}, int32(4)
	return &specrej.GenerateRequest{
		Prompt:       &specrej.Prompt{Messages: []*specrej.Message{turn}},
		Sampling:     &specrej.Sampling{MaxTokens: &maxTokens, IgnoreEos: true},
		Selection:    &specrej.Selection{N: &n},
		CacheControl: specrej.CacheControl_CACHE_CONTROL_BYPASS,
	}
}

func TestAnswer(t *testing.T) {
	client, ctx := connect(t)
	answer, err := client.Generate(ctx, request(40))
	if err != nil {
		t.Fatal(err)
	}
	if answer.Text == "" || answer.Usage.AnswerTokens != 40 {
		t.Errorf("an answer of 40 tokens is %q with %v", answer.Text, answer.Usage)
	}
}

func TestStream(t *testing.T) {
	client, ctx := connect(t)
	stream, err := client.GenerateStream(ctx, &specrej.GenerateStreamRequest{Request: request(40)})
	if err != nil {
		t.Fatal(err)
	}
	numRounds, text := 0, ""
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch event := response.Event.(type) {
		case *specrej.GenerateStreamResponse_RoundCompleted:
			numRounds++
		case *specrej.GenerateStreamResponse_Finished:
			text = event.Finished.Text
		}
	}
	if numRounds != 3 || text == "" {
		t.Errorf("%d rounds, text %q", numRounds, text)
	}
}

func TestErrorHasTheFieldPath(t *testing.T) {
	client, ctx := connect(t)
	_, err := client.Generate(ctx, request(-1))
	failure := status.Convert(err)
	if failure.Code() != codes.InvalidArgument {
		t.Fatal(err)
	}
	for _, detail := range failure.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			if field := bad.FieldViolations[0].Field; field != "sampling.max_tokens" {
				t.Errorf("the field is %q", field)
			}
			return
		}
	}
	t.Errorf("no BadRequest in %v", failure.Details())
}

func TestCancellation(t *testing.T) {
	client, ctx := connect(t)
	call, cancel := context.WithCancel(ctx)
	long := &specrej.GenerateStreamRequest{Request: request(4000)}
	stream, err := client.GenerateStream(call, long)
	if err != nil {
		t.Fatal(err)
	}
	response, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	record := &specrej.GetRecordRequest{RequestId: response.GetAdmitted().RequestId}
	for outcome := ""; outcome != "CANCELLED"; time.Sleep(50 * time.Millisecond) {
		found, err := client.GetRecord(ctx, record)
		if err != nil {
			t.Fatal(err)
		}
		outcome = found.Record.Outcome
	}
}
